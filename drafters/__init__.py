"""What a drafter is: models, losses, the accept/reject mathematics, checkpoints.

Imports neither Ray nor the other packages.
"""
