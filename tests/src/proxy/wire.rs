//! The part of MongoDB's wire protocol that the proxy reads: whole messages, the command in a request, the hosts in a
//! `hello` reply.

use std::{collections::HashMap, io};

use bson::{Bson, Document, RawDocument};
use tokio::io::{AsyncRead, AsyncReadExt as _};

const HEADER: usize = 16;
/// `maxMessageSizeBytes` of every server, and room for a header.
const LARGEST: usize = 48_000_000 + 16 * 1024;

const OP_REPLY: i32 = 1;
const OP_QUERY: i32 = 2004;
const OP_MSG: i32 = 2013;
const CHECKSUM_PRESENT: i32 = 1;

/// A command on its way to the server.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its name: `insert`, `commitTransaction`, …
    pub command: String,
    /// The collection of the command, if it names one.
    pub collection: Option<String>,
    /// The database of the command.
    pub database: String,
    /// The whole command. Documents that were sent in separate sections are arrays in it, as in a log.
    pub body: Document,
}

impl Request {
    /// Whether it is this command on this collection.
    pub fn is(&self, command: &str, collection: &str) -> bool {
        self.command == command && self.collection.as_deref() == Some(collection)
    }

    fn of(body: Document, namespace: Option<&str>) -> Option<Self> {
        let (command, target) = body.iter().next()?;
        let collection = target.as_str().or_else(|| body.get_str("collection").ok()).map(ToOwned::to_owned);
        let database = body.get_str("$db").ok().or_else(|| namespace?.split('.').next()).unwrap_or_default().to_owned();
        Some(Self { command: command.clone(), collection, database, body })
    }
}

/// One complete message with its header.
#[derive(Debug)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// The next message, or `None` at the end of the stream.
    pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let mut bytes = vec![0; HEADER];
        match from.read_exact(&mut bytes).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            done => done?,
        };
        let length = size(&bytes).filter(|length| (HEADER..=LARGEST).contains(length));
        bytes.resize(length.ok_or_else(|| io::Error::other("this is not MongoDB's protocol"))?, 0);
        from.read_exact(&mut bytes[HEADER..]).await?;
        Ok(Some(Self(bytes)))
    }

    /// The bytes of the message, for sending it on.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its own id.
    pub(super) fn id(&self) -> i32 {
        self.int(4).unwrap_or_default()
    }

    /// The id of the request that this message replies to.
    pub(super) fn answers(&self) -> i32 {
        self.int(8).unwrap_or_default()
    }

    /// The command in it. `None` for a reply, and for kinds of messages that drivers send only if configured, such as
    /// compressed ones.
    pub(super) fn request(&self) -> Option<Request> {
        match self.kind()? {
            OP_MSG => Request::of(self.sections()?, None),
            OP_QUERY => {
                // Flags, the collection's full name, two numbers, the command.
                let (namespace, rest) = c_string(self.0.get(HEADER + 4..)?)?;
                Request::of(document(rest.get(8..)?)?, Some(namespace))
            }
            _ => None,
        }
    }

    /// Replaces the hosts in a reply to `hello`. Other messages are unchanged.
    pub(super) fn rename_hosts(&mut self, names: &HashMap<String, String>) {
        if let Some(renamed) = self.with_hosts_renamed(names) {
            self.0 = renamed;
        }
    }

    fn with_hosts_renamed(&self, names: &HashMap<String, String>) -> Option<Vec<u8>> {
        let at = match self.kind()? {
            // Flags, the kind of the only section.
            OP_MSG => HEADER + 5,
            // Flags, a cursor's id, two numbers.
            OP_REPLY => HEADER + 20,
            _ => return None,
        };
        let body = self.0.get(at..)?;
        let raw = RawDocument::from_bytes(body.get(..size(body)?)?).ok()?;
        raw.get("setName").ok()??;
        raw.get("hosts").ok()??;
        let mut hello = document(body)?;
        for field in ["hosts", "passives", "arbiters", "primary", "me"] {
            hello.get_mut(field).into_iter().for_each(|hosts| rename(hosts, names));
        }
        let mut bytes = [&self.0[..at], &hello.to_vec().ok()?].concat();
        let length = i32::try_from(bytes.len()).ok()?;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        if self.kind() == Some(OP_MSG) {
            let flags = self.int(HEADER)? & !CHECKSUM_PRESENT;
            bytes[HEADER..HEADER + 4].copy_from_slice(&flags.to_le_bytes());
        }
        Some(bytes)
    }

    /// The sections of an `OP_MSG` as one document.
    fn sections(&self) -> Option<Document> {
        let checksum = if self.int(HEADER)? & CHECKSUM_PRESENT == 0 { 0 } else { 4 };
        let mut rest = self.0.get(HEADER + 4..self.0.len() - checksum)?;
        let (mut body, mut sequences) = (Document::new(), Document::new());
        while let Some((kind, sections)) = rest.split_first() {
            // A section of either kind begins with its size.
            let (section, after) = sections.split_at_checked(size(sections)?)?;
            match kind {
                0 => body = document(section)?,
                1 => {
                    let (name, mut sequence) = c_string(section.get(4..)?)?;
                    let mut documents = Vec::new();
                    while !sequence.is_empty() {
                        let (one, others) = sequence.split_at_checked(size(sequence)?)?;
                        documents.push(document(one)?);
                        sequence = others;
                    }
                    sequences.insert(name, documents);
                }
                _ => return None,
            }
            rest = after;
        }
        body.extend(sequences);
        Some(body)
    }

    fn kind(&self) -> Option<i32> {
        self.int(12)
    }

    fn int(&self, at: usize) -> Option<i32> {
        int(self.0.get(at..)?)
    }
}

fn int(bytes: &[u8]) -> Option<i32> {
    bytes.first_chunk().map(|bytes| i32::from_le_bytes(*bytes))
}

/// The size at the begin of messages, sections and documents.
fn size(bytes: &[u8]) -> Option<usize> {
    // The size of an empty document is the minimum, so that loops over documents always advance.
    int(bytes).and_then(|size| usize::try_from(size).ok()).filter(|size| *size >= 5)
}

fn c_string(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some((str::from_utf8(&bytes[..end]).ok()?, &bytes[end + 1..]))
}

fn document(bytes: &[u8]) -> Option<Document> {
    Document::from_reader(bytes).ok()
}

fn rename(hosts: &mut Bson, names: &HashMap<String, String>) {
    if let Bson::Array(hosts) = hosts {
        hosts.iter_mut().for_each(|host| rename(host, names));
    } else if let Some(name) = hosts.as_str().and_then(|host| names.get(host)) {
        *hosts = name.as_str().into();
    }
}
