"""The shop: one route, three items."""

import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

ITEMS = [
    {"name": "rope", "price": 1250, "stock": 3},
    {"name": "anchor", "price": 8900, "stock": 1},
    {"name": "buoy", "price": 450, "stock": 12},
]


class Shop(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(ITEMS).encode()
        self.send_response(200 if self.path == "/items" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


HTTPServer(("127.0.0.1", int(os.environ["SHOP_PORT"])), Shop).serve_forever()
