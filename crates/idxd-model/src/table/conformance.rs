//! Which test shows which row of the specification.
