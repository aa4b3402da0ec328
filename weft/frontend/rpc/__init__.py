"""The gRPC door. `serve_rpc` in `server` opens it; `ai_service.proto` says what goes through it."""
