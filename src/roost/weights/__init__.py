"""Weight transfer from trainers to engines: transports, their endpoints, and the sync of one version."""
