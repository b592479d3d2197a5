//! Every order of events of the queue modules, by loom:
//!
//!     scripts/interleavings
//!
//! A request is represented by a number, with a flag for its completion by the device.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use crate::pool::Pool;
use crate::table::{Detached, Step, Table};

struct Work {
    number: usize,
    done: Arc<AtomicBool>,
}

fn look(work: &mut Work) -> Step {
    if work.done.load(Ordering::Acquire) { Step::Done } else { Step::Going }
}

/// Makes a table with one request in progress, and the flag of its device.
fn one() -> (Arc<Table<Work>>, crate::table::Id, Arc<AtomicBool>) {
    let (table, done) = (Arc::new(Table::new(2)), Arc::new(AtomicBool::new(false)));
    let id = table.lock().insert(Work { number: 7, done: done.clone() }, &Step::Going).ok().unwrap();
    (table, id, done)
}

#[test]
fn owner_and_backstop_together_deliver_once() {
    loom::model(|| {
        let (table, _, done) = one();
        let backstop = {
            let (table, done) = (table.clone(), done.clone());
            thread::spawn(move || {
                done.store(true, Ordering::Release);
                if let Some(mut slots) = table.try_lock() {
                    slots.harvest(look, |_| panic!("somebody wants it"));
                }
            })
        };
        let mut delivered = 0;
        let mut collect = || {
            let mut slots = table.lock();
            slots.harvest(look, |_| panic!("somebody wants it"));
            delivered += usize::from(slots.take().is_some());
        };
        collect();
        backstop.join().unwrap();
        collect();
        collect();
        assert_eq!(delivered, 1);
    });
}

#[test]
fn a_dropped_ticket_and_a_completion_recycle_the_request_once_and_deliver_nothing() {
    loom::model(|| {
        let (table, id, done) = one();
        let away = Arc::new(AtomicUsize::new(0));
        let backstop = {
            let (table, away) = (table.clone(), away.clone());
            thread::spawn(move || {
                done.store(true, Ordering::Release);
                if let Some(mut slots) = table.try_lock() {
                    slots.harvest(look, |work| {
                        away.fetch_add(work.number, Ordering::Relaxed);
                    });
                }
            })
        };
        match table.lock().detach(id, |_| false) {
            Detached::Mine(work) => {
                away.fetch_add(work.number, Ordering::Relaxed);
            }
            Detached::Disowned => {}
            Detached::Gone => panic!("nobody took it"),
        }
        backstop.join().unwrap();
        let mut slots = table.lock();
        slots.harvest(look, |work| {
            away.fetch_add(work.number, Ordering::Relaxed);
        });
        assert!(slots.take().is_none(), "delivered although its ticket was dropped");
        assert_eq!(away.load(Ordering::Relaxed), 7);
        // Its slot serves the next request, and the old id is invalid.
        assert!(matches!(slots.detach(id, |_| true), Detached::Gone));
    });
}

#[test]
fn a_channel_that_closes_while_the_backstop_harvests_leaves_nothing_behind() {
    loom::model(|| {
        let (table, _, done) = one();
        let away = Arc::new(AtomicUsize::new(0));
        let closer = {
            let (table, away) = (table.clone(), away.clone());
            thread::spawn(move || {
                table.lock().close(|_| {
                    away.fetch_add(1, Ordering::Relaxed);
                });
            })
        };
        done.store(true, Ordering::Release);
        if let Some(mut slots) = table.try_lock() {
            slots.harvest(look, |_| {
                away.fetch_add(1, Ordering::Relaxed);
            });
        }
        closer.join().unwrap();
        let mut slots = table.lock();
        slots.harvest(look, |_| {
            away.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!((slots.active(), slots.done(), away.load(Ordering::Relaxed)), (0, 0, 1));
        assert!(slots.closed());
    });
}

#[test]
fn a_waiting_owner_is_woken_by_a_completion_that_came_before_between_or_after() {
    loom::model(|| {
        let (table, _, done) = one();
        let backstop = {
            let table = table.clone();
            thread::spawn(move || {
                done.store(true, Ordering::Release);
                // The waiter may hold the lock for a moment: the real backstop would return later; here it waits.
                let delivered = table.lock().harvest(look, |_| panic!("somebody wants it"));
                if delivered > 0 {
                    table.bell.ring();
                }
            })
        };
        let delivered = loop {
            let heard = table.bell.heard();
            if let Some((_, work)) = table.lock().take() {
                break work.number;
            }
            // Without a timeout: a lost ring is a deadlock, which loom reports.
            table.bell.wait(heard, None);
        };
        assert_eq!(delivered, 7);
        backstop.join().unwrap();
    });
}

#[test]
fn a_pool_never_gives_one_thing_to_two() {
    loom::model(|| {
        let pool = Arc::new(Pool::new(2));
        let held = Arc::new(AtomicUsize::new(0));
        let made = Arc::new(AtomicUsize::new(0));
        let turn = move |pool: &Pool<usize>, held: &AtomicUsize, made: &AtomicUsize| {
            let one = pool.take(|| made.fetch_add(1, Ordering::Relaxed));
            let bit = 1 << one;
            assert_eq!(held.fetch_or(bit, Ordering::AcqRel) & bit, 0, "{one} is held twice");
            held.fetch_and(!bit, Ordering::AcqRel);
            pool.put(one);
        };
        let other = {
            let (pool, held, made) = (pool.clone(), held.clone(), made.clone());
            thread::spawn(move || turn(&pool, &held, &made))
        };
        turn(&pool, &held, &made);
        other.join().unwrap();
        let (of_pool, free) = pool.counts();
        assert_eq!((of_pool, free), (made.load(Ordering::Relaxed), of_pool));
    });
}
