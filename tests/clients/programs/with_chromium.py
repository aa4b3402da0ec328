"""A page of another origin asks the server, and tells this program what came."""

import http.server
import json
import subprocess
import tempfile
import threading

from features import ASK, FEW, MODEL, V1, feature

PAGE = """<script type="module">
const told = {};
const asked = %s;
const post = (body) => fetch("%s/chat/completions", {
  method: "POST", headers: {"Content-Type": "application/json", Authorization: "Bearer none", "x-stainless-os": "web"},
  body: JSON.stringify(body),
});
try {
  told.models = (await (await fetch("%s/models", {headers: {Authorization: "Bearer none"}})).json()).data[0].id;
  told.chat = (await (await post(asked)).json()).choices[0].message.content;
  let text = "";
  for await (const part of (await post({...asked, stream: true})).body) text += new TextDecoder().decode(part);
  told.stream = text.includes("[DONE]") ? text.slice(0, 80) : "";
} catch (error) { told.error = String(error); }
await fetch("/told", {method: "POST", body: JSON.stringify(told)});
</script>"""
page = (PAGE % (json.dumps({"model": MODEL, "messages": ASK, "max_tokens": FEW}), V1, V1)).encode()
told, came = {}, threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self):
        told.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        came.set()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    browser = subprocess.Popen(
        ["chromium", *words, f"http://127.0.0.1:{server.server_port}/"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    came.wait(120)
    browser.terminate()
    browser.wait()


def of(name):
    assert name in told, told.get("error", "the page told nothing")
    return told[name]


@feature
def models():
    return of("models")


@feature
def chat():
    return of("chat")


@feature
def stream():
    return of("stream")
