"""The offline jobs, in the order of the flow: generate (Ray Data), train (Ray Train), evaluate."""
