"""Files that clients upload, and batches, which run the requests in a file when there is room for them."""
