"""The roles of an RL job: trainers, rollout engines, their router, buffer and lock, and weight sync."""
