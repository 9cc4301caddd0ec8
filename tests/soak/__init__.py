"""Everything at once, for a while, with faults at random: ``python -m tests.soak --seconds 120 --seed 0``.

Workers behind faulty proxies, or whose sockets are cut (`served`, `cuts`), clients that do what users do and
compare each result with the same done locally (`load`, `client`), and a run that kills clients, and checks in
the end that each call ran once and that the workers hold nothing any more (`run`, `checks`). What it found is
a `report`.
"""
