//! The laboratory itself: machines that start, disks that hold reads, the list of mutants.

mod disks;
mod machines;
mod mutants;
mod qmp;
