"""The shared engine: vLLM's own OpenAI server with this package's worker and routes.

`plugin` hangs everything into vLLM's server; `desk` knows who has what; `guard` asks every request who
sends it. What users are kept from each other by is said in README: names, owners, leases and limits, not
walls. A block is Python in a process that all share.
"""
