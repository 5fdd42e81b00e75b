"""How ranks meet: each brings a message or an error, one decides, all hear the answer.

`Meeting.round` is the only protocol. Either all ranks raise or none does. Saves, loads and exports
hold their rounds over the job's c10d store, without collectives. FULL state, which runs collectives
anyway, holds them over a process group. A single process meets itself.
"""
