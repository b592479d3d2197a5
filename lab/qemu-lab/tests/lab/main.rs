//! The laboratory itself: machines that start, disks that hold, the list of mutants.

mod disks;
mod machines;
mod mutants;
mod qmp;
