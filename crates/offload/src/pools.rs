//! The idle requests of a process, by the NUMA node of their memory.

use std::sync::Arc;

use crate::pool::Pool;
use crate::request::Request;
use crate::state::State;
use crate::work::Shape;

/// The pools of all nodes. The first also serves nodes without one.
#[derive(Clone, Debug)]
pub(crate) struct ByNode(Arc<[Arc<Pools>]>);

impl ByNode {
    /// Makes a pool of each shape. Panics if there is none.
    pub(crate) fn new(shapes: impl Iterator<Item = Shape>) -> Self {
        let pools: Arc<[_]> = shapes.map(Pools::new).collect();
        assert!(!pools.is_empty(), "requests without a node have a pool too");
        Self(pools)
    }

    /// Returns the pools of `node`.
    pub(crate) fn of(&self, node: Option<u32>) -> &Arc<Pools> {
        let of_node = self.0.iter().find(|pools| node.is_some() && pools.shape().node == node);
        of_node.unwrap_or(&self.0[0])
    }

    /// Returns a detached request, which no device has, to its pool.
    pub(crate) fn put_away(&self, mut request: Box<Request>) {
        request.leave();
        if request.state() == State::Queued {
            request.go(State::Done);
        }
        request.go(State::Free);
        self.of(request.node()).put(request);
    }

    /// Returns how many requests were made, and how many are free.
    pub(crate) fn counts(&self) -> (usize, usize) {
        self.0.iter().map(|pools| pools.counts()).fold((0, 0), |sum, (made, free)| (sum.0 + made, sum.1 + free))
    }
}

/// The requests of one node: with and without a buffer of their own.
#[derive(Debug)]
pub(crate) struct Pools {
    shape: Shape,
    plain: Pool<Box<Request>>,
    buffered: Pool<Box<Request>>,
}

impl Pools {
    pub(crate) fn new(shape: Shape) -> Arc<Self> {
        Arc::new(Self { shape, plain: Pool::new(256), buffered: Pool::new(256) })
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Takes a free request.
    pub(crate) fn take(&self, buffer: bool) -> Box<Request> {
        self.of(buffer).take(|| Box::new(Request::new(self.shape, buffer)))
    }

    /// Returns a request to the pool.
    pub(crate) fn put(&self, mut request: Box<Request>) {
        debug_assert_eq!(request.state(), State::Free);
        // Idle requests keep no regions.
        request.reset(request.operation);
        self.of(request.buffer.is_some()).put(request);
    }

    /// Returns how many requests were made, and how many are free.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let (plain, buffered) = (self.plain.counts(), self.buffered.counts());
        (plain.0 + buffered.0, plain.1 + buffered.1)
    }

    fn of(&self, buffer: bool) -> &Pool<Box<Request>> {
        if buffer { &self.buffered } else { &self.plain }
    }
}
