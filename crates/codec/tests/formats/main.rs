//! Round trips of every format and engine, and hostile input.

mod contents;
mod deflate_formats;
mod engines;
mod hostile;
mod iaa;
