//! What Sterna's test guests do: fill memory, dirty it, and verify that every page is what they themselves wrote last.
//!
//! Two guests are made of it: the init of Linux guests (this package's program), and the bare payload of
//! `lab/microvm`, which has neither an operating system nor an allocator: so nothing here needs one.
#![cfg_attr(not(test), no_std)]

pub mod content;
pub mod disk;
pub mod memory;
pub mod page;
pub mod record;
pub mod share;
