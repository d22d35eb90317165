#!/bin/bash
set -e
mkdir -p logs
cat > logs/monday.log <<'LOG'
08:00:01 GET /index.html 200
08:00:02 GET /cart 502
08:00:09 POST /cart 500
08:01:00 GET /about 404
LOG
cat > logs/tuesday.log <<'LOG'
09:00:00 GET /search 503
09:00:04 GET /cart 200
09:10:00 DELETE /account 500
09:10:01 GET /500 200
LOG
rm setup.sh
