//! Guest RAM: bitmaps, page scans, snapshots, and the ways to place pages into it.
