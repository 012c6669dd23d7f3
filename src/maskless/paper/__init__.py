"""The paper as data: every number of its tables, the speed of its released code, and what we want to reach.

The paper is "Partition Generative Modeling" (PGM).
"""
