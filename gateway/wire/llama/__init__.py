"""The API of llama.cpp's server for its own clients."""
