"""State that a worker keeps from call to call, in time that grows linearly with the number of calls.

Such a worker has one graph for the results of all calls. `graph_segments` is needed for right gradients: it
finds what results depend on, without which contributions would be missing. The rest is for speed: if each
gradient went back through that graph alone, the sums would be the same, but T calls would cost T runs of up
to T steps. So:

- forward, on the worker: `graph_segments` finds what a result depends on without walking any node twice, and
  names earlier results that stand for a part of it;
- forward, on the caller: `remote_segments` remembers what those names stand for, and which results have a
  graph in common;
- backward, on the caller: `gathering` sends the gradients of such results in one request;
- backward, on both: where contributions are needed before the last gradient is there, `suspended` lets the
  worker's backward wait for the rest.
"""
