//! The whole table of other hands: each act at each moment, in both modes. `STERNA_CELL="Reset Stopped direct"` runs the cells whose names
//! contain this.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use crate::other_hands::Cell;

/// Concurrent cells; each mostly waits.
const WORKERS: usize = 2;

#[test]
fn whatever_is_done_to_a_guest_that_is_moved_it_executes_once_and_what_is_reported_is_true() {
    let wanted = std::env::var("STERNA_CELL").unwrap_or_default();
    let cells: Vec<Cell> = Cell::all().into_iter().filter(|cell| cell.to_string().contains(&wanted)).collect();
    assert!(!cells.is_empty(), "no cell is named {wanted:?}");
    let (queue, ends) = (Mutex::new(cells.iter()), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some(cell) = queue.lock().unwrap().next() else { return };
                    let end = catch_unwind(AssertUnwindSafe(|| cell.run()))
                        .unwrap_or_else(|_| Some(Err(format!("{cell}: the test panicked, see above"))));
                    if let Some(end) = &end {
                        match end {
                            Ok(text) => println!("CELL {text}"),
                            Err(error) => println!("CELL FAILED {error}"),
                        }
                    }
                    ends.lock().unwrap().extend(end.map(|end| (cell.to_string(), end)));
                }
            });
        }
    });
    let ends = ends.into_inner().unwrap();
    let failed: Vec<_> = ends.iter().filter(|(_, end)| end.is_err()).map(|(cell, _)| cell).collect();
    assert!(failed.is_empty(), "{} of {} cells failed: {failed:?}", failed.len(), cells.len());
}
