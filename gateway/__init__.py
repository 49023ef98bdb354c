"""HTTP and SSE: what clients see. Never imports torch.

    app.py       all routes, and the middleware around them
    endpoints/   what is served under which path
    service.py   what one served model has beside its engine
    sessions/    what is kept from one request to the next: recordings, responses, conversations, prefixes
    dispatch.py  the way of every generation: into the queue, from the steps to its readers, out again
    metrics.py   what the operator sees
    wire/        the OpenAI format: bodies, sampling, prompts, streams, frames
    access/      who may use how much: keys, quotas, idempotency
    store/       what outlives a process or is shared by several: in memory, in Redis
    http/        the ground: connections, limits, errors, hosts, the page

Imports run from the top of this list to its end, never back.
"""
