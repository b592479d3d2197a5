//! The post-copy channel at the destination: admits it, and places its packets, on a thread of its own for each incarnation.

use std::fmt::Display;
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use sterna_wire::header::ChannelKind;
use sterna_wire::reason::Reason;

use super::target::{RamSink, Target};
use crate::cpu_time;
use crate::receive::{ChannelSink, PacketRules, ReceiveCounters, SinkError, receive_packets};
use crate::session::ExtraChannelHandler;
use crate::transport::accept_channel;

/// The post-copy channels: one of each incarnation.
#[derive(Clone, Default)]
pub(super) struct PostCopyChannels(Arc<Mutex<PostCopyThreads>>);

#[derive(Default)]
struct PostCopyThreads {
    /// The incarnation of the newest channel; 0 before the first.
    latest: u32,
    threads: Vec<JoinHandle<()>>,
}

impl PostCopyChannels {
    /// Returns the handler that admits post-copy channels.
    pub(super) fn handler(&self, target: &Arc<Target>, rules: PacketRules) -> ExtraChannelHandler {
        let (target, channels) = (Arc::clone(target), Arc::clone(&self.0));
        Box::new(move |header, connection, abort| {
            let Some(post_copy) = target.post_copy().filter(|_| header.kind == ChannelKind::PostCopy) else {
                return Err(Box::new((connection, "no such channel is expected here".into())));
            };
            let mut channels = channels.lock().expect("no thread panics with the lock held");
            if header.index > 0 || header.incarnation <= channels.latest {
                return Err(Box::new((connection, "the post-copy channel exists already".into())));
            }
            let first = std::mem::replace(&mut channels.latest, header.incarnation) == 0;
            let post_copy = Arc::clone(post_copy);
            let (abort, failed, closer) = (Arc::clone(abort), Arc::clone(abort), connection.closer());
            let closing = abort.on_end_while_held(move || closer.close());
            let mut sink = ChannelSink::new().with_pages(RamSink::of_post_copy(&target));
            let thread = move || {
                let _closing = closing;
                let lost = |reason: &dyn Display| {
                    abort.lost(format_args!("the post-copy channel: {reason}"));
                };
                let (writer, mut reader) = match accept_channel(connection) {
                    Ok(halves) => halves,
                    Err(error) => return lost(&error),
                };
                let serve = || -> Result<(), SinkError> {
                    // A guest that has all pages that it uses causes no requests, and so no packets.
                    reader.set_timeout(None)?;
                    if first {
                        post_copy.connected(writer)?;
                    } else {
                        post_copy.reconnected(writer)?;
                    }
                    let received = receive_packets(&mut reader, None, &mut sink, rules, &ReceiveCounters::default());
                    post_copy.disconnected();
                    Ok(received?)
                };
                if let Err(error) = serve() {
                    lost(&error);
                }
            };
            match cpu_time::spawn(Builder::new().name("post-copy".into()), thread) {
                Ok(thread) => channels.threads.push(thread),
                Err(error) => {
                    failed.raise(Reason::other(format_args!("no thread for the post-copy channel: {error}")));
                }
            }
            Ok(())
        })
    }

    pub(super) fn join(&self) {
        let threads = std::mem::take(&mut self.0.lock().expect("no thread panics with the lock held").threads);
        for thread in threads {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}
