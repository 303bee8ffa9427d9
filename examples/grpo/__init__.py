"""A small model learns to add from nothing but a rule reward, by GRPO."""
