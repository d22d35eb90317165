#!/bin/bash
reward=1
expect() {
    grep -qF -- "$2" "/app/site/$1" 2>/dev/null || { echo "$1 lacks: $2"; reward=0; }
}
expect welcome.html '<h1>Welcome</h1>'
expect welcome.html '<p>Fish &amp; chips for everyone</p>'
expect rules.html '<p>Keep x &lt; y at all times</p>'
expect contact.html '<h1>Contact</h1>'
for page in welcome rules contact; do
    expect index.html "href=\"$page.html\""
done
echo "$reward" > /logs/verifier/reward.txt
