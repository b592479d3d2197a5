//! Machines with their guests, on KVM and without: they run, stop, move and notice faults.
//!
//! Nothing here waits for a time to pass: tests wait for guests by their progress.

mod devices;
mod dirty;
mod disk;
mod faults;
mod moves;
mod running;
mod soak;
mod support;
