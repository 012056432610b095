"""What the integration tests stand on: tiny models, a reference, and real SGLang servers."""
