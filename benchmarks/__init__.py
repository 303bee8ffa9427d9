"""How fast Roost is, and how much memory it takes, beside a floor. Run with ``make bench``."""
