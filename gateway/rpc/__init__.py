"""gRPC: the Open Inference Protocol, and a service of our own for streams of text. It needs `penstock[grpc]`."""
