"""The decode engine: slots of KV cache, rows, rounds. Runs without Ray."""
