//! What travels between two Sterna hosts, and both ends of the conversation as state machines without I/O or clocks.
