"""How Draftloop is run: the command line, run files, manifests."""
