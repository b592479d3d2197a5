//! The laboratory: real QEMUs, real guests and networks, started and taken down for tests, demo and benchmarks.
