//! The `sterna` program.
fn main() {}
