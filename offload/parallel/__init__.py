"""Training on many ranks: ZeRO stages 1 to 3, hybrid sharding, and what belongs to the life of such a job."""
