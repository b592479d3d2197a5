//! Guests that move between two processes of the program, over loopback, and verify their memory before, during and after.
//!
//! Nothing here waits for a time to pass: processes are waited for by what they say, and guests by what they have done.

mod devices;
mod failures;
mod moves;
mod outside;
mod post_copy;
mod process;
