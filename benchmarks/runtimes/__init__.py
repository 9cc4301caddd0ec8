"""The ways to reach a far side, behind one interface, so that a row of the benchmark is written once."""
