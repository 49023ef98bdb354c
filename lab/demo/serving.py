# ruff: noqa: E501 (templates: a line per thought)
"""Questions and answers about Penstock and about how a language model is served."""

from random import Random

from lab.demo.grammar import as_typed, chance, fill, pick
from lab.demo.tokenizer import Message

# Names of a thing, then what may be said of it: first what it is, then more for "tell me more".
# A question about a topic is built from its first name or any other.
TOPICS: list[tuple[str, list[str], list[str]]] = [
    ("Penstock|penstock|this server|the Penstock server",
     ["Penstock is a server for language models. It is one process: an SSE gateway with lanes stands directly in front of the step loop that runs the model.",
      "Penstock takes chat requests over HTTP, queues them by lane, feeds them to a model in the same process, and streams every token back."],
     ["It speaks OpenAI's API on port 8000 and runs on a CPU or a GPU.", "It does continuous batching, chunked prefill and paged KV with a prefix cache."]),
    ("paged KV|paged attention|the paged KV cache|KV paging|PagedAttention",
     ["Paged KV keeps the keys and values of each sequence in small fixed blocks, 16 tokens each, so that memory is never wasted on room that nobody uses.",
      "With paged KV, the cache is cut into blocks of 16 tokens. A table per sequence says which blocks are its own, just like pages in an operating system."],
     ["Blocks can be shared between sequences that start with the same text.", "When a sequence ends, its blocks go back to the free list at once."]),
    ("the KV cache|a KV cache|KV cache|kv caching",
     ["The KV cache holds the keys and values of all tokens seen so far, so that each new token needs only one small step and not the whole text again.",
      "The KV cache is the model's memory of the conversation: the keys and values that attention has already computed."],
     ["It grows by one entry per token and layer, and that is why memory limits how many people can be served at once."]),
    ("chunked prefill|prefill chunking|chunked prefilling",
     ["Chunked prefill reads a long prompt in pieces, a piece per step, so that running streams never have to wait for the whole prompt.",
      "With chunked prefill, a long prompt is cut into chunks that share each step with the tokens of other requests. Nobody's stream stalls."],
     ["The size of a chunk follows from the token budget of the step.", "Without it, one very long prompt would freeze every running answer."]),
    ("prefill|the prefill phase|prefilling",
     ["Prefill is the part of a request in which the model reads the prompt. All its tokens are computed together, which is fast per token.",
      "In prefill the model reads your prompt and fills the KV cache. After that it decodes, one token at a time."],
     ["Prefill is limited by computing power, decode mostly by memory bandwidth."]),
    ("decode|decoding|the decode phase",
     ["Decode is the part in which the model writes its answer, one token per step.", "In decode each step reads all the weights to make one token per sequence, so a larger batch is nearly free."],
     ["That is why servers put many requests into one batch."]),
    ("a lane|lanes|the lanes|a priority lane|priority lanes",
     ["Penstock has three lanes: interactive, standard and batch. A request in a higher lane goes first when there is not enough room for all.",
      "Lanes are queues of different urgency: interactive for people who are waiting, standard for most things, and batch for work that can wait."],
     ["You choose a lane with service_tier: priority is interactive, default is standard and flex is batch.", "A long wait is never forever: lower lanes still get their share."]),
    ("the interactive lane|interactive", ["The interactive lane is for people who watch the answer appear. It goes first."], ["Ask for it with service_tier priority."]),
    ("the batch lane|the flex lane", ["The batch lane is for work that can wait, such as a long list of texts over night. It uses the room that others leave."], ["Ask for it with service_tier flex."]),
    ("continuous batching|in-flight batching|dynamic batching",
     ["Continuous batching lets requests join and leave the batch at every step, so that nobody waits for the slowest one to finish.",
      "With continuous batching the batch is put together anew at each step: finished requests leave, waiting ones come in."],
     ["The weights are read once per step for the whole batch, so a full batch makes good use of the machine."]),
    ("speculative decoding|speculation|speculative sampling",
     ["In speculative decoding a small draft model guesses several tokens, and the large model checks them all in one step. Right guesses are kept, so more than one token comes out of a step.",
      "Speculative decoding means that a cheap draft runs ahead and the model only verifies. The answer stays exactly what the model alone would have said."],
     ["It pays when the draft is often right and the machine has computing power to spare.", "Wrong guesses are simply thrown away."]),
    ("a draft model|the draft model|the draft",
     ["A draft model is a small and fast model that guesses the next tokens for a larger one.", "The draft is my little sister: a tenth of my size, and it guesses what I am about to say."],
     ["It has to use the same tokenizer as the large model."]),
    ("prefix caching|the prefix cache|a prefix cache|prompt caching",
     ["The prefix cache remembers blocks of text that were computed before. When a prompt starts with the same text, those blocks are used again and the first token comes sooner.",
      "With prefix caching, a prompt that begins like an earlier one skips the part that is already known."],
     ["Each block is found by a hash of its tokens and of all blocks before it.", "Each tenant has a salt of its own, so nobody can find out what others have asked."]),
    ("copy-on-write|copy on write|a copy-on-write fork",
     ["Copy-on-write lets two sequences share a block until one of them wants to change it. Only then the block is copied.",
      "When a request asks for several answers, they share the blocks of the prompt. A block is copied only when one of them writes to it."],
     ["That saves memory and time when one prompt has many answers."]),
    ("preemption|preemption by recompute|a preempted request",
     ["When the KV blocks run out, Penstock stops the request of the lowest lane that is cheapest to compute again, gives its blocks to others and goes on with it later.",
      "Preemption means that a running request makes room for a more urgent one. It is recomputed later, and its stream stays open."],
     ["Its blocks keep their hash, so much of the work can often be found again in the prefix cache."]),
    ("a block|a KV block|the block size", ["A block holds the keys and values of 16 tokens. All blocks have the same size, so any free one will do."], ["A pool hands them out and counts who uses them."]),
    ("time to first token|TTFT|ttft", ["Time to first token, TTFT for short, is the time from your request until the first token of the answer arrives. It is the wait that people feel most."],
     ["It is made of the time in the queue and the time of the prefill.", "Penstock plans to promise it per lane, and to refuse at once what it could not keep."]),
    ("TPOT|time per output token|tpot|inter-token latency", ["Time per output token, TPOT for short, is the time between two tokens of an answer. It says how fast the text flows."], ["About 100 milliseconds per token is already faster than most people read."]),
    ("throughput", ["Throughput is how many tokens a server makes per second for everybody together."], ["A larger batch gives more throughput, but each single answer may become slower."]),
    ("latency", ["Latency is how long one has to wait: for the first token, and then for each further one."], ["Throughput and latency pull in different directions, and the scheduler has to balance them."]),
    ("the step loop|a step|the engine step|the engine", ["The step loop is the heart of the server. Each step has three parts: plan what to compute, execute it on the model, and commit the new tokens."],
     ["One thread owns the model and does nothing else."]),
    ("the scheduler|scheduling|a scheduler", ["The scheduler decides at every step whose tokens are computed: first the running sequences, then those who wait, within one token budget."], ["It knows the lanes, the free blocks and how far each sequence has come."]),
    ("the gateway|an SSE gateway|the SSE gateway", ["The gateway is the front door: it takes HTTP requests, checks them, turns messages into tokens and streams the answer back."], ["In Penstock it lives in the same process as the engine, so there is no hop in between."]),
    ("SSE|server-sent events|streaming", ["SSE means server-sent events: the server keeps the connection open and sends each piece of the answer as soon as it is there."], ["Set stream to true in your request to use it."]),
    ("a token|tokens|tokenization", ["A token is a piece of text, such as a word or a part of one. Models read and write tokens, not letters."], ["My tokenizer knows 3,072 of them."]),
    ("a tokenizer|the tokenizer|BPE|byte-level BPE", ["A tokenizer cuts text into tokens and puts them together again. Mine is a byte-level BPE, so it can write any text in the world."], ["BPE learns to join the pairs of characters that often stand side by side."]),
    ("attention|self-attention|the attention mechanism", ["Attention lets each token look back at all tokens before it and take from them what it needs."], ["It compares a query with keys and mixes the values."]),
    ("a transformer|transformers|the transformer", ["A transformer is a kind of neural network made of layers of attention and small dense networks. Nearly all language models are transformers."], ["I am one too, with four layers."]),
    ("a language model|an LLM|LLMs|a large language model", ["A language model reads text and guesses the next token, again and again. A large one is called an LLM."], ["I am a very small one."]),
    ("sampling|token sampling", ["Sampling means to choose the next token at random, following the probabilities that the model gives."], ["Temperature and top-p say how daring the choice may be."]),
    ("temperature|the temperature", ["Temperature says how daring the choice of the next token is. At 0 the most likely token is always taken; higher values give more surprise."], ["For me, about 0.7 is a good value."]),
    ("top-p|top_p|nucleus sampling", ["Top-p keeps only the most likely tokens that together reach the probability p, and chooses among these."], ["With 0.9, the unlikely tail is cut off."]),
    ("quantization|quantisation|int8|quantized weights", ["Quantisation stores the weights with fewer bits, for example 8 or 4 instead of 16. The model becomes smaller and faster, and loses a little precision."], ["Decode is limited by memory, so smaller weights help directly."]),
    ("a CUDA graph|CUDA graphs", ["A CUDA graph records the work of a step once and then replays it with a single call, so that the CPU does not slow the GPU down."], ["It helps most when each step is short."]),
    ("a GPU|GPUs", ["A GPU is a chip that does many small calculations at once, which is just what a language model needs."], ["Penstock runs on a GPU, and also without one."]),
    ("a penstock|a penstock pipe|the name Penstock", ["A penstock is the gated pipe that feeds water to a turbine. Penstock the server feeds requests to a model in the same way.", "A penstock is a pipe with a gate that leads water to a turbine."],
     ["The gate decides how much comes through, and that is what lanes do."]),
    ("resumable streams|a resumable stream", ["A resumable stream can go on where it stopped after the connection was lost. It is one of Penstock's plans."], ["The server keeps the events, and the client says which one it saw last."]),
    ("a tenant|tenants", ["A tenant is one customer of the server, known by the API key. Each gets a fair share and a salt of its own in the prefix cache."], ["So one tenant can neither starve nor spy on another."]),
    ("admission control|admission|load shedding", ["Admission control decides at the door whether a request can be served in time. If not, it is refused at once and told when to come back."], ["An honest no is better than a long wait for nothing."]),
    ("the OpenAI API|OpenAI's API|the API", ["Penstock speaks OpenAI's API, so any client for it works. Chat requests go to http://127.0.0.1:8000/v1/chat/completions."], ["Set the base URL of your client to http://127.0.0.1:8000/v1."]),
    ("a stop sequence|stop sequences|an end token|the end token", ["It is a sign that tells the server to stop writing. I end each answer with a special end token."], ["You can also give stop strings of your own."]),
    ("perplexity", ["Perplexity says how surprised a model is by a text. Lower is better, and 1 would be no surprise at all."], ["It is measured on text that was not used in training."]),
    ("a batch|batching|a batch size", ["A batch is a group of requests that go through the model together. The weights are read once for all of them."], ["That is much cheaper than one after the other."]),
    ("the context length|a context window|the context window|your context length", ["The context is how much text a model can look at. Mine is 2,048 tokens, prompt and answer together."], ["Whatever is further back cannot be seen."]),
    ("backpressure|a slow client", ["When a client reads slowly, its own small buffer fills up. The engine never waits for it, and past a limit the client is cut off."], ["So one slow reader cannot hold up the others."]),
    ("safetensors|a checkpoint", ["Safetensors is a file format for the weights of a model. It is fast to load and cannot run any code."], ["My own weights come in such a file."]),
]  # fmt: skip
ASKS = [
    "What is {x}?", "What is {x}?", "What's {x}?", "Explain {x}.", "Tell me about {x}.", "How does {x} work?", "What does {x} mean?",
    "Can you explain {x}?", "What do you know about {x}?", "Please explain {x}.", "Describe {x}.", "{x}?", "What does {x} do?",
    "Explain {x} to me.", "Do you know what {x} is?", "I want to understand {x}.", "Can you tell me about {x}?",
]  # fmt: skip
PLURAL = {"tokens", "lanes", "tenants", "LLMs", "GPUs", "transformers", "CUDA graphs", "stop sequences", "server-sent events",
          "resumable streams", "the lanes", "priority lanes", "quantized weights"}  # fmt: skip
MORE = "[Tell me more.|More, please.|Can you tell me more?|And what else?|Go on.|What else?|More about that.|Why?|Why is that good?]"
QUESTIONS = [
    ("[Which|What] lanes [are there|does Penstock have]?|How many lanes are there?", "There are three lanes: interactive, standard and batch."),
    ("[How do I choose|How can I choose|How do I set] [a|the] lane?|How do I use the batch lane?", "Set service_tier in your request: priority is the interactive lane, default is standard, and flex is batch."),
    ("How [large|big] is a [KV |]block?|How many tokens are in a block?|What is the block size of Penstock?", "A block holds 16 tokens."),
    ("[Where|On which port|On what port] does Penstock [listen|run]?|Which port does Penstock use?|What is the URL?|What is the base URL?", "By default Penstock listens on http://127.0.0.1:8000."),
    ("[Which|What] API does [Penstock|it] [speak|use]?|Is it compatible with OpenAI?|Is Penstock compatible with OpenAI?", "It speaks OpenAI's API, so your usual client works. Set its base URL to http://127.0.0.1:8000/v1."),
    ("[How do I|How can I|How to] start [Penstock|the server]?|How do I run Penstock?", "Run make serve. It sets everything up and serves the demo model on http://127.0.0.1:8000."),
    ("Does [Penstock|it] [need|require] a GPU?|Can [Penstock|it] run without a GPU?|Does it run on a CPU?|Can it run on a laptop?", "No GPU is needed: Penstock runs on a CPU as well. With a GPU it is much faster."),
    ("Why is (it|Penstock) called Penstock?|Where does the name come from?|Why the name?".replace("(it|Penstock)", "[it|Penstock]"), "A penstock is the gated pipe that feeds a turbine. Penstock feeds requests to a model in the same way."),
    ("How many processes does [Penstock|it] have?|Is Penstock one process?|Why one process?", "Just one. The gateway and the engine live in the same process, so the queue, the prefill and the free blocks are all known exactly, and there is no hop in between."),
    ("What [happens|does Penstock do] when [memory|the KV cache|the pool] [is full|runs out]?|What happens when the blocks run out?", "Then the cheapest request of the lowest lane is preempted. Its blocks are given to others, and it is recomputed later while its stream stays open."),
    ("What is Penstock [written|made] in?|Which language is Penstock written in?", "Penstock is written in Python, with PyTorch for the model."),
    ("[How do I|How can I|How to] stream [an answer|tokens|the answer]?|How do I get a stream?", "Set stream to true in your request. Then each token comes as a server-sent event as soon as it is there."),
    ("[How do I|How can I|How to] [use|serve|load] [another|a different|my own] model?|Can I use another model?", "Start the server with --model and the folder or the name of a model in Hugging Face format."),
    ("Why is the first token slow[er|]?|What makes the first token slow?|Why do I wait for the first token?", "Before the first token your request may wait in the queue, and then the model has to read the whole prompt. That is the prefill."),
    ("What is the difference between prefill and decode?|Prefill or decode, what is the difference?|Prefill vs decode?", "Prefill reads the whole prompt at once and is limited by computing power. Decode writes one token per step and is mostly limited by memory bandwidth."),
    ("What is the difference between latency and throughput?|Latency vs throughput?", "Latency is how long one person waits. Throughput is how many tokens are made per second for everybody together."),
    ("Does speculation change the answer?|Is speculative decoding exact?|Does speculative decoding change the output?", "No. Every guess is checked by the model, and the answer follows exactly the model's own distribution."),
    ("What is planned[ for Penstock|]?|What are the plans?|What comes next in Penstock?|What is on the roadmap?", "The plans are promises on the time to first token, streams that can be resumed, and speculative decoding."),
    ("Why [is|are] [large|big] batch[es|] good?|Why does batching help?", "Each step reads all the weights once. With a larger batch, that cost is shared by more requests."),
    ("Can [others|other users|somebody] see my prompts?|Is the prefix cache safe?|Is the cache private?", "The prefix cache has a salt for each tenant, so nobody can find out what others have asked by watching the time."),
    ("How many tokens can you [read|see]?|How long can my prompt be?|What is your context?", "My context is 2,048 tokens, prompt and answer together."),
    ("What happens when I close the connection?|What happens if the client goes away?|What if I disconnect?", "Then your request leaves the batch at the next step, and its blocks are free again."),
    ("What makes Penstock [special|different]?|Why should I use Penstock?|What is good about Penstock?", "The gateway sits directly in front of the step loop, in one process. So the queue place, the cached tokens and the speed of each request are known exactly, and you can see them."),
    ("How many layers do you have?|What is your architecture?|What is your vocabulary?|How are you built?", "I am a small Llama: four layers, a hidden size of 256 and a vocabulary of 3,072 tokens."),
]  # fmt: skip


def about_serving(rng: Random) -> list[Message]:
    if chance(rng, 0.33):
        question, answer = pick(rng, QUESTIONS)
        return [("user", as_typed(rng, fill(rng, f"[{question}]"))), ("assistant", answer)]
    names, answers, more = pick(rng, TOPICS)
    name = pick(rng, [names.split("|")[0], *names.split("|")])
    question = number_agrees(pick(rng, ASKS).format(x=name), name)
    question = question[0].upper() + question[1:]
    messages: list[Message] = [("user", as_typed(rng, question)), ("assistant", pick(rng, answers))]
    if chance(rng, 0.35):
        messages += [("user", as_typed(rng, fill(rng, MORE))), ("assistant", more[0])]
        if len(more) > 1:
            messages += (
                [("user", as_typed(rng, fill(rng, MORE))), ("assistant", more[1])] if chance(rng, 0.4) else []
            )
    elif chance(rng, 0.3):
        messages[-1] = ("assistant", f"{messages[-1][1]} {more[0]}")
    return messages


def number_agrees(question: str, name: str) -> str:
    if name not in PLURAL:
        return question
    return question.replace("What is ", "What are ").replace("What's ", "What are ").replace(" does ", " do ").replace(
        f"{name} is", f"{name} are"
    )  # fmt: skip
