"""NeMo RL's dialect: what becomes of its keys here."""
