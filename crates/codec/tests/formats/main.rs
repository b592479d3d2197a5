//! Formats and engines of compressed batches: what goes in comes out, and nothing else does harm.

mod contents;
mod deflate_formats;
mod engines;
mod hostile;
mod iaa;
