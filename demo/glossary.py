"""A glossary of LLM serving: term -> the sentence with which the demo model answers."""

GLOSSARY = {
    "paged attention": "Paged attention keeps the KV cache in small fixed-size blocks, so that "
    "memory is used without gaps, like pages in an operating system.",
    "a KV cache": "A KV cache stores the keys and values of past tokens, so that each new token "
    "needs only one step of work.",
    "continuous batching": "Continuous batching lets requests join and leave the batch at every "
    "step instead of waiting for the whole batch to finish.",
    "prefill": "Prefill is the pass that reads the whole prompt and fills the KV cache.",
    "decoding": "Decoding is the loop that makes one new token per step from the KV cache.",
    "chunked prefill": "Chunked prefill splits a long prompt into pieces, so that other requests "
    "keep making tokens in between.",
    "a prefix cache": "A prefix cache reuses the KV blocks of a prompt start that was seen before.",
    "speculative decoding": "Speculative decoding lets a cheap draft guess several tokens and the "
    "large model check them in one step.",
    "a draft model": "A draft model is a small model that guesses tokens for a larger one to "
    "check.",
    "tensor parallelism": "Tensor parallelism splits each layer's weights over several GPUs that "
    "work on the same token together.",
    "pipeline parallelism": "Pipeline parallelism puts different layers on different GPUs and "
    "passes the activations along.",
    "quantization": "Quantization stores weights in fewer bits to save memory and bandwidth.",
    "LoRA": "LoRA adds small low-rank matrices to frozen weights, so that many fine-tuned "
    "adapters can share one base model.",
    "a token": "A token is a piece of text, such as a word or part of a word, that a model reads "
    "or writes as one number.",
    "a tokenizer": "A tokenizer turns text into token ids and token ids back into text.",
    "attention": "Attention lets each token gather information from the tokens before it.",
    "a transformer": "A transformer is a neural network built from layers of attention and "
    "feed-forward blocks.",
    "an embedding": "An embedding is a vector of numbers that stands for a token or a text.",
    "a logit": "A logit is the raw score of a token before softmax turns scores into "
    "probabilities.",
    "softmax": "Softmax turns a list of scores into probabilities that sum to one.",
    "temperature": "Temperature scales the logits: low values make the output predictable, high "
    "values make it varied.",
    "top-p sampling": "Top-p sampling draws from the smallest set of tokens whose probabilities "
    "sum to p.",
    "top-k sampling": "Top-k sampling draws from the k most likely tokens only.",
    "greedy decoding": "Greedy decoding always takes the most likely token.",
    "throughput": "Throughput is how many tokens a server makes per second over all requests.",
    "latency": "Latency is how long one request waits for its answer.",
    "time to first token": "Time to first token is the wait from sending a request to the first "
    "token of its answer.",
    "preemption": "Preemption takes memory back from a running request, which is resumed later.",
    "a block table": "A block table lists which memory blocks hold the KV cache of a sequence.",
    "a scheduler": "A scheduler decides at each step which requests run and how many tokens each "
    "one gets.",
    "FlashAttention": "FlashAttention computes attention in tiles that stay in fast memory, so "
    "that the full score matrix is never stored.",
    "a CUDA graph": "A CUDA graph records a sequence of GPU kernels once and replays it with "
    "little launch overhead.",
    "Triton": "Triton is a language for writing GPU kernels in Python.",
    "grouped-query attention": "Grouped-query attention lets several query heads share one key "
    "and value head, which makes the KV cache smaller.",
    "a stop sequence": "A stop sequence is a text that ends the answer as soon as it appears.",
    "Quire": "Quire is a server that runs large language models behind an OpenAI-compatible API.",
}

# User spellings of each term; the key is the canonical term.
ALIASES = {
    "paged attention": ["PagedAttention", "paged attention"],
    "a KV cache": ["the KV cache", "a KV cache", "KV caching", "a key-value cache"],
    "a prefix cache": ["prefix caching", "a prefix cache", "the prefix cache"],
    "decoding": ["decoding", "the decode phase", "decode"],
    "prefill": ["prefill", "the prefill phase"],
    "quantization": ["quantization", "quantisation"],
    "LoRA": ["LoRA", "a LoRA adapter"],
    "time to first token": ["time to first token", "TTFT"],
    "top-p sampling": ["top-p sampling", "top-p", "nucleus sampling"],
    "top-k sampling": ["top-k sampling", "top-k"],
    "FlashAttention": ["FlashAttention", "flash attention"],
    "grouped-query attention": ["grouped-query attention", "GQA"],
    "a block table": ["a block table", "the block table"],
    "a scheduler": ["a scheduler", "the scheduler"],
    "a transformer": ["a transformer", "the transformer"],
}
