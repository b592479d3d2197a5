//! Guests that move between two processes of the program, over loopback, and verify their memory before, during and after.
//!
//! Nothing here waits for a time to pass: tests wait for processes by their output, and for guests by their progress.

mod devices;
mod failures;
mod moves;
mod outside;
mod post_copy;
mod process;
