"""One program for each peer, run by that peer's own Python; it may import its peer and the standard library.

Of this package only `nnsight_lab.bench.rounds` and `nnsight_lab.bench.peers.works` are imported, which need
nothing else: the peers' environments have no nnsight-lab installed.
"""
