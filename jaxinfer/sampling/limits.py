"""Most entries of one request in the sampler's arrays. Apart from the arrays, so that a front end need not load JAX."""

MAX_LOGPROBS = 20
"""Most alternatives returned per position (OpenAI's limit)."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Most explicitly named tokens whose log-probabilities are returned per position."""
MAX_LOGIT_BIAS = 512
"""Most biased tokens per request."""
