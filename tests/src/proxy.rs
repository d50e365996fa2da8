//! A faulty network: a proxy between one process and its MongoDB that understands the messages.
//!
//! It has one listener for each member of the replica set. It writes its own listeners into replies to `hello`, so that
//! a driver that discovers members by these replies stays on the proxy. A process that uses the proxy's connection
//! string has a network of its own: a cut affects only that process.
//!
//! Faults affect single requests ([`Proxy::arm`]) or the whole line ([`Proxy::sever`], [`Proxy::blackhole`], …). A
//! blocked line keeps the data it received, as TCP does, and delivers it late when it is healed.

mod wire;

use std::{
    collections::{BTreeSet, HashMap},
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    ops::{Bound, RangeBounds},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use mongodb::options::ClientOptions;
use recruiter_common::shutdown::pause;
use tokio::{
    io::AsyncWriteExt as _,
    net::{
        TcpListener, TcpSocket, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    runtime::{Builder, Runtime},
    sync::watch,
    task::JoinSet,
    time::timeout,
    try_join,
};

use crate::wait::SOON;
use wire::Message;
pub use wire::Request;

/// Maximum number of connections waiting to be accepted.
const BACKLOG: u32 = 1024;

/// A member of a replica set, as its proxy knows it.
#[derive(Clone, Debug)]
pub struct Member {
    /// `host:port` in the configuration of the replica set.
    pub name: String,
    /// The `host:port` on which it listens.
    pub address: String,
}

/// The fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The server executes it, its reply is dropped, and the client's connection is closed.
    LoseReply,
    /// The server does not receive it, and the client's connection is closed.
    Cut,
    /// The server executes it, its reply is never delivered, and the connection stays open until the client closes it.
    Stall,
    /// The server receives it after this delay and executes it, even if the client has disconnected.
    StallRequest(Duration),
    /// The server receives it once it is [released](Armed::release).
    Hold,
}

/// A proxy in front of one MongoDB. It runs on a thread of its own, so that a test may block, and ends when it is
/// dropped.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    /// `host:port` of its listeners, in the order of the members.
    listeners: Vec<String>,
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct Shared {
    members: Vec<Member>,
    /// Maps the members' names to the proxy's listeners, where they differ.
    names: HashMap<String, String>,
    line: watch::Sender<Line>,
    rules: Mutex<Vec<Arc<Rule>>>,
}

/// The state of the network.
#[derive(Clone, Debug, Default)]
struct Line {
    fault: Option<Fault>,
    /// Number of times that all connections were closed.
    severed: u32,
    /// Members whose connections are blocked in both directions.
    isolated: BTreeSet<usize>,
    /// Latency of each message, and bytes per second of each connection.
    slow: Option<(Duration, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Severed,
    Blackhole,
    BlackholeReplies,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

impl Proxy {
    /// A proxy in front of the MongoDB at this connection string, which must name all members of the replica set `rs0`.
    pub async fn before(uri: &str) -> Self {
        let options = ClientOptions::parse(uri).await.expect("the URI is good");
        let members = options.hosts.iter().map(|host| Member { name: host.to_string(), address: host.to_string() });
        Self::before_members(members.collect())
    }

    /// A proxy in front of these members of the replica set `rs0`.
    pub fn before_members(members: Vec<Member>) -> Self {
        Self::start(Self::reserve(members.len()), |_| members)
    }

    /// A proxy between members that listen on these ports. They must use its listeners as each other's addresses.
    pub(crate) fn between(ports: &[u16]) -> Self {
        let member = |(name, port): (&String, &u16)| Member { name: name.clone(), address: format!("127.0.0.1:{port}") };
        Self::start(Self::reserve(ports.len()), |listeners| listeners.iter().zip(ports).map(member).collect())
    }

    fn reserve(listeners: usize) -> Vec<Port> {
        (0..listeners).map(|_| Port::reserve().expect("there are free ports on 127.0.0.1")).collect()
    }

    fn start(ports: Vec<Port>, members: impl FnOnce(&[String]) -> Vec<Member>) -> Self {
        let listeners: Vec<String> = ports.iter().map(|port| port.address.to_string()).collect();
        let members = members(&listeners);
        let pairs = members.iter().map(|member| member.name.clone()).zip(listeners.iter().cloned());
        let names = pairs.filter(|(name, own)| name != own).collect();
        let shared = Arc::new(Shared { members, names, line: watch::Sender::default(), rules: Mutex::default() });
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime can be made");
        for (member, port) in ports.into_iter().enumerate() {
            // From here on it listens, so that early connections are accepted.
            let _inside = runtime.enter();
            let listener = port.listen().expect("the port is reserved");
            runtime.spawn(Arc::clone(&shared).serve(member, port, listener));
        }
        Self { shared, listeners, runtime: Some(runtime) }
    }

    /// The connection string: `mongodb://127.0.0.1:P1,127.0.0.1:P2/DATABASE?replicaSet=rs0`.
    pub fn uri(&self, database: &str) -> String {
        format!("mongodb://{}/{database}?replicaSet=rs0", self.listeners.join(","))
    }

    /// `host:port` of its listeners, in the order of the members.
    pub fn listeners(&self) -> &[String] {
        &self.listeners
    }

    /// Arms a fault for the requests that `matches` selects and whose number, counted from 1, is in `which`: `1..=1` is
    /// only the first one, `..` is all.
    pub fn arm(&self, action: Action, which: impl RangeBounds<u32>, matches: impl Fn(&Request) -> bool + Send + Sync + 'static) -> Armed {
        let rule = Arc::new(Rule {
            action,
            which: (which.start_bound().cloned(), which.end_bound().cloned()),
            matches: Box::new(matches),
            matched: Mutex::default(),
            struck: watch::Sender::default(),
            is_released: watch::Sender::default(),
        });
        self.shared.rules().push(Arc::clone(&rule));
        Armed { rule, shared: Arc::clone(&self.shared) }
    }

    /// Closes all connections and refuses new ones.
    pub fn sever(&self) {
        self.shared.line.send_modify(|line| {
            line.fault = Some(Fault::Severed);
            line.severed += 1;
        });
    }

    /// Accepts connections and keeps them open, but delivers nothing.
    pub fn blackhole(&self) {
        self.shared.line.send_modify(|line| line.fault = Some(Fault::Blackhole));
    }

    /// Delivers requests, but no replies.
    pub fn blackhole_replies(&self) {
        self.shared.line.send_modify(|line| line.fault = Some(Fault::BlackholeReplies));
    }

    /// Delivers nothing to this member, and nothing from it to the others.
    pub fn isolate(&self, member: usize) {
        self.shared.line.send_modify(|line| {
            line.isolated.insert(member);
        });
    }

    /// Delays every message by this latency, plus the time for its bytes on a connection of this speed.
    pub fn slow(&self, latency: Duration, bytes_per_second: u64) {
        self.shared.line.send_modify(|line| line.slow = Some((latency, bytes_per_second.max(1))));
    }

    /// Ends all faults of the line. Faults of single requests stay armed.
    pub fn heal(&self) {
        self.shared.line.send_modify(|line| *line = Line { severed: line.severed, ..Line::default() });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Not by the runtime's own drop, which blocks: this code may run where blocking is not allowed.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// An armed fault. Dropping it disarms it.
#[derive(Debug)]
#[must_use = "dropping this disarms the fault"]
pub struct Armed {
    rule: Arc<Rule>,
    shared: Arc<Shared>,
}

impl Armed {
    /// Waits until the fault has struck, and its effect (the server's work or its silence) has happened.
    pub async fn fired(&self) {
        let mut struck = self.rule.struck.subscribe();
        let fired = timeout(SOON, struck.wait_for(|times| *times > 0)).await;
        fired.unwrap_or_else(|_| panic!("{self:?} never struck")).expect("the rule is here");
    }

    /// Lets a held request go on. So what a test does while it is held is done in time, however slow the machine is.
    pub fn release(&self) {
        self.rule.is_released.send_replace(true);
    }

    /// Number of requests affected.
    pub fn count(&self) -> u32 {
        *self.rule.struck.borrow()
    }

    /// Number of requests that matched, affected or not.
    pub fn matched(&self) -> u32 {
        *self.rule.matched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.release();
        self.shared.rules().retain(|rule| !Arc::ptr_eq(rule, &self.rule));
    }
}

struct Rule {
    action: Action,
    which: (Bound<u32>, Bound<u32>),
    matches: Box<dyn Fn(&Request) -> bool + Send + Sync>,
    matched: Mutex<u32>,
    struck: watch::Sender<u32>,
    is_released: watch::Sender<bool>,
}

impl Rule {
    fn picks(&self, request: &Request) -> bool {
        (self.matches)(request) && {
            let mut matched = self.matched.lock().unwrap_or_else(PoisonError::into_inner);
            *matched += 1;
            self.which.contains(&*matched)
        }
    }

    fn strike(&self) {
        self.struck.send_modify(|times| *times += 1);
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("action", &self.action).field("which", &self.which).finish_non_exhaustive()
    }
}

/// A port that stays reserved while nothing listens on it.
struct Port {
    address: SocketAddr,
    _reserved: TcpSocket,
}

impl Port {
    fn reserve() -> io::Result<Self> {
        let reserved = bound((Ipv4Addr::LOCALHOST, 0).into())?;
        Ok(Self { address: reserved.local_addr()?, _reserved: reserved })
    }

    fn listen(&self) -> io::Result<TcpListener> {
        bound(self.address)?.listen(BACKLOG)
    }
}

fn bound(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    Ok(socket)
}

impl Shared {
    fn rules(&self) -> MutexGuard<'_, Vec<Arc<Rule>>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts connections to a member. Each end of the inner loop closes all of them, and the listener.
    async fn serve(self: Arc<Self>, member: usize, port: Port, mut listener: TcpListener) {
        let mut line = self.line.subscribe();
        let mut severed = line.borrow().severed;
        loop {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    Ok((client, _)) = listener.accept() => {
                        connections.spawn(Connection::pass(Arc::clone(&self), member, client));
                    }
                    Some(_) = connections.join_next() => {}
                    _ = line.wait_for(|line| line.severed != severed) => break,
                }
            }
            drop((listener, connections));
            let Ok(healed) = line.wait_for(|line| line.fault != Some(Fault::Severed)).await.map(|line| line.severed) else { return };
            severed = healed;
            listener = port.listen().expect("the port is reserved");
        }
    }

    /// The member that opened a connection. Members of a replica set with test commands name themselves in their first
    /// request.
    fn origin(&self, first: &Request) -> Option<usize> {
        let (_, port) = first.body.get_str("hostInfo").ok()?.rsplit_once(':')?;
        self.members.iter().position(|member| member.address.rsplit_once(':').is_some_and(|(_, own)| own == port))
    }
}

/// A connection to a member, from a client or from another member.
struct Connection {
    shared: Arc<Shared>,
    to: usize,
    from: Option<usize>,
    /// Faults that wait for the replies to these requests.
    awaited: Mutex<HashMap<i32, Arc<Rule>>>,
}

impl Connection {
    /// Passes messages on until either side or a fault closes the connection, which is returned as an error.
    async fn pass(shared: Arc<Shared>, to: usize, client: TcpStream) -> io::Result<()> {
        client.set_nodelay(true)?;
        let (mut client_in, client_out) = client.into_split();
        // The client sends first.
        let first = Message::read(&mut client_in).await?.ok_or(io::ErrorKind::ConnectionAborted)?;
        let from = first.request().and_then(|request| shared.origin(&request));
        let this = Self { shared, to, from, awaited: Mutex::default() };
        this.open(Way::ToServer).await;
        let server = TcpStream::connect(&this.shared.members[to].address).await?;
        server.set_nodelay(true)?;
        let (server_in, server_out) = server.into_split();
        try_join!(this.requests(first, client_in, server_out), this.replies(server_in, client_out)).map(|_| ())
    }

    async fn requests(&self, first: Message, mut client: OwnedReadHalf, mut server: OwnedWriteHalf) -> io::Result<()> {
        let mut next = Some(first);
        while let Some(request) = next {
            self.request(&request, &mut server).await?;
            next = Message::read(&mut client).await?;
        }
        self.open(Way::ToServer).await;
        // Closes only one direction: the server may still execute earlier requests.
        server.shutdown().await
    }

    async fn request(&self, message: &Message, server: &mut OwnedWriteHalf) -> io::Result<()> {
        let picked = self.picked(message);
        match picked.as_ref().map(|rule| rule.action) {
            Some(Action::Cut) => {
                picked.inspect(|rule| rule.strike());
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            Some(Action::StallRequest(time)) => {
                picked.inspect(|rule| rule.strike());
                pause(time).await;
            }
            Some(Action::Hold) => {
                if let Some(rule) = picked {
                    rule.strike();
                    // Never fails, because the sender is in `rule`.
                    let _ = rule.is_released.subscribe().wait_for(|is_released| *is_released).await;
                }
            }
            Some(Action::LoseReply | Action::Stall) => {
                self.awaited().extend(picked.map(|rule| (message.id(), rule)));
            }
            None => {}
        }
        self.open(Way::ToServer).await;
        self.travel(message).await;
        server.write_all(message.bytes()).await
    }

    async fn replies(&self, mut server: OwnedReadHalf, mut client: OwnedWriteHalf) -> io::Result<()> {
        loop {
            let reply = Message::read(&mut server).await;
            let struck = reply.as_ref().ok().and_then(|reply| self.awaited().remove(&reply.as_ref()?.answers()));
            if let Some(rule) = struck {
                rule.strike();
                if rule.action == Action::Stall {
                    continue;
                }
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.open(Way::ToClient).await;
            let mut reply = reply?.ok_or(io::ErrorKind::ConnectionAborted)?;
            reply.rename_hosts(&self.shared.names);
            self.travel(&reply).await;
            client.write_all(reply.bytes()).await?;
        }
    }

    /// The fault for this request. Every fault that it matches counts it.
    fn picked(&self, message: &Message) -> Option<Arc<Rule>> {
        let rules = self.shared.rules();
        if rules.is_empty() {
            return None;
        }
        let request = message.request()?;
        let picking: Vec<_> = rules.iter().filter(|rule| rule.picks(&request)).collect();
        picking.first().map(|rule| Arc::clone(rule))
    }

    fn awaited(&self) -> MutexGuard<'_, HashMap<i32, Arc<Rule>>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the line delivers messages in this direction.
    async fn open(&self, way: Way) {
        let alone = |line: &Line| line.isolated.contains(&self.to) || self.from.is_some_and(|from| line.isolated.contains(&from));
        let lets_through = |line: &Line| match line.fault {
            _ if alone(line) && self.from != Some(self.to) => false,
            None => true,
            Some(Fault::BlackholeReplies) => way == Way::ToServer,
            Some(Fault::Blackhole | Fault::Severed) => false,
        };
        // Never fails, because the sender is in `self`.
        let _ = self.shared.line.subscribe().wait_for(lets_through).await;
    }

    async fn travel(&self, message: &Message) {
        let slow = self.shared.line.borrow().slow;
        if let Some((latency, bytes_per_second)) = slow {
            let bytes = u64::try_from(message.bytes().len()).unwrap_or(u64::MAX);
            pause(latency + Duration::from_micros(bytes.saturating_mul(1_000_000) / bytes_per_second)).await;
        }
    }
}
