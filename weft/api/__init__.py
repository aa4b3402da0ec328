"""HTTP and gRPC codecs, which know an engine by its contract alone."""
