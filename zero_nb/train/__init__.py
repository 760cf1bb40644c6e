"""Real training: models, the four ZeRO stages, the ledger of bytes, the engine."""
