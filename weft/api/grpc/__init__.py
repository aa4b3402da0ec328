"""The gRPC door. `serve_rpc` in `server` opens it; `ai_service.proto` says what goes through it."""

import os

# gRPC's own library writes to the terminal what Weft says in its errors; whoever wants both sets it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
