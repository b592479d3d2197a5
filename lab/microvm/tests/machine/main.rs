//! Machines with their guests, on KVM and without: they run, stop, move and notice what went wrong.
//!
//! Nothing here waits for a time to pass: guests are waited for by what they have done.

mod devices;
mod dirty;
mod disk;
mod faults;
mod moves;
mod running;
mod support;
