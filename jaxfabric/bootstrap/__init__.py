"""How processes of one job find each other: membership, address exchange, coordination service."""
