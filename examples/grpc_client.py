"""A streamed prediction over gRPC: python grpc_client.py ["The sea is"].

The messages come with `weft-serve`; clients in other languages make theirs from weft/api/grpc/ai_service.proto.
"""

import os
import sys

import grpc

from weft.api.grpc.ai_service_pb2 import GenerationParameters, StreamPredictRequest, StreamPredictResponse

METHOD = "/cy.llm.AiInference/StreamPredict"
key = os.environ.get("SERVER_KEY", "none")
prompt = sys.argv[1] if len(sys.argv) > 1 else "The sea is"
with grpc.insecure_channel(os.environ.get("SERVER_GRPC", "127.0.0.1:50051")) as channel:
    predict = channel.stream_stream(METHOD, StreamPredictRequest.SerializeToString, StreamPredictResponse.FromString)
    parameters = GenerationParameters(temperature=0, max_new_tokens=20)
    requests = iter([StreamPredictRequest(prompt=prompt, generation=parameters)])
    for response in predict(requests, metadata=[("authorization", f"Bearer {key}")], timeout=600):
        print(response.chunk, end="", flush=True)
        if response.end_of_stream:
            print(f"\n{response.completion_tokens} tokens, {response.tokens_per_sec:.0f} tok/s")
