//! Certificates that a test makes, and a real mongod that demands TLS.

use std::{
    fs,
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use bson::doc;
use mongodb::Client;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use recruiter_common::ConnectArgs;
use recruiter_dev::embedded::{EmbeddedMongo, Options};
use tempfile::TempDir;

use crate::{
    cache,
    machine::workspace,
    mongo::{PASSWORD, USER, temporary},
    mongosh,
    wait::{SOON, wait_for},
};

/// Certificates that are valid for any test.
pub const VALID: i32 = 4000;
/// Certificates that have expired.
pub const EXPIRED: i32 = 2025;

/// An authority, and a directory with the certificates that it has signed. `ca.pem` in it is the certificate of the authority.
pub struct Authority {
    directory: TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Default for Authority {
    fn default() -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "an authority of the tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a certificate");
        let this = Self { directory: tempfile::tempdir().expect("the temporary directory is writable"), issuer };
        this.write("ca.pem", &this.issuer.pem());
        this
    }
}

impl Authority {
    /// A file of this directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Writes a file that only this user may read.
    ///
    /// # Panics
    /// When the directory is not writable.
    pub fn write(&self, name: &str, content: &str) {
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(self.file(name)).expect("writable");
        file.write_all(content.as_bytes()).expect("writable");
    }

    /// The certificate of the authority with its key, which no server should use as its own.
    pub fn own(&self) -> String {
        self.issuer.pem() + self.issuer.key().serialize_pem().as_str()
    }

    /// Signs a certificate with `CN=name,OU=unit`, for these hosts, that is valid until this year. The certificate and its key.
    ///
    /// # Panics
    /// When a host is no name and no address.
    pub fn sign(&self, name: &str, unit: &str, hosts: &[&str], until: i32) -> (String, String) {
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).expect("names of hosts");
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationalUnitName, unit);
        params.distinguished_name.push(DnType::CommonName, name);
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(until, 1, 1));
        // A member of a replica set is a client of the others.
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().expect("a key");
        (params.signed_by(&key, &self.issuer).expect("a certificate").pem(), key.serialize_pem())
    }

    /// The same in a file, the certificate and its key.
    pub fn sign_into(&self, file: &str, name: &str, unit: &str, hosts: &[&str], until: i32) {
        let (certificate, key) = self.sign(name, unit, hosts, until);
        self.write(file, &format!("{certificate}{key}"));
    }

    /// Starts a mongod with `--tlsMode requireTLS` and the certificate of this file, and with these arguments. Nobody has initiated its
    /// replica set.
    ///
    /// # Panics
    /// When it does not start.
    pub async fn mongod(&self, certificate: &str, arguments: &[&str], environment: &[(&str, &str)]) -> EmbeddedMongo {
        let mut all = vec![
            "--tlsMode=requireTLS".to_owned(),
            format!("--tlsCertificateKeyFile={}", self.file(certificate).display()),
            format!("--tlsCAFile={}", self.file("ca.pem").display()),
        ];
        all.extend(arguments.iter().map(ToString::to_string));
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        EmbeddedMongo::start(Options { member: true, arguments: all, environment, ..temporary() }).await.expect("mongod starts")
    }

    /// Starts a mongod with TLS and access control as a replica set, and the connection string of its only user, [`USER`]. It takes clients
    /// with a certificate and without.
    ///
    /// # Panics
    /// When MongoDB refuses.
    pub async fn replica_set(&self) -> (EmbeddedMongo, String) {
        self.sign_into("server.pem", "127.0.0.1", "servers", &["127.0.0.1", "localhost"], VALID);
        self.write("key", "the members of a replica set know each other by this");
        let key = format!("--keyFile={}", self.file("key").display());
        let mongo = self.mongod("server.pem", &["--auth", &key, "--tlsAllowConnectionsWithoutCertificates"], &[]).await;
        let address = format!("127.0.0.1:{}", mongo.port());
        let uri = |user: &str, more: &str| format!("mongodb://{user}{address}/?tls=true&tlsCAFile={}{more}", self.file("ca.pem").display());
        let first = Client::with_uri_str(uri("", "&directConnection=true")).await.expect("a connection string").database("admin");
        let members = doc! { "_id": "rs0", "members": [{ "_id": 0, "host": &address }] };
        first.run_command(doc! { "replSetInitiate": members }).await.expect("nobody has initiated it");
        let made = async || {
            // Refused until it is primary.
            first.run_command(doc! { "createUser": USER, "pwd": PASSWORD, "roles": ["root"] }).await.ok()
        };
        wait_for(SOON, "the first user is made", made).await;
        (mongo, uri(&format!("{USER}:{PASSWORD}@"), "&replicaSet=rs0&authSource=admin"))
    }

    /// A connection string of the page, with the hosts and files of a test.
    pub fn here(&self, uri: &str, mongo: &EmbeddedMongo) -> String {
        let uri = uri.replace("db1.example.org,db2.example.org", &format!("127.0.0.1:{}", mongo.port()));
        uri.replace("PASSWORD", PASSWORD).replace("/etc/recruiter", &self.directory.path().display().to_string())
    }

    /// Makes the roles, and two users with them, as the page says: one with a password, and one with the certificate `workers.pem`. Both have
    /// also the role of a leader.
    ///
    /// # Panics
    /// When something is refused, or the page has another name than the certificate.
    pub async fn make_users(&self, root: &str) {
        let root = ConnectArgs::to(root).database("jobs").uri;
        let said = mongosh::eval(&root, &format!("load({:?})", workspace().join("shell/roles.js").display().to_string()));
        assert!(said.contains("recruiterWorker made"), "{said}");
        let client = Client::with_uri_str(&root).await.expect("a connection string");
        let roles = ["recruiterLeader", "recruiterWorker", "recruiterCleaner"];
        let made = doc! { "createUser": "workers", "pwd": PASSWORD, "roles": roles };
        client.database("jobs").run_command(made).await.expect("a new user");
        self.sign_into("workers.pem", "workers", "recruiter", &[], VALID);
        let page = section();
        let words = between(&page, "   openssl ", "\n");
        let printed = cache::run(Command::new("openssl").args(words.split(' ')).current_dir(self.directory.path()));
        let subject = printed.trim().strip_prefix("subject=").expect("it prints the subject");
        let command = between(&page, "   db.getSiblingDB", "   ```");
        assert!(command.contains(&format!("createUser: \"{subject}\"")), "{subject}");
        mongosh::eval(&root, &format!("db.getSiblingDB{command}"));
        let granted = doc! { "grantRolesToUser": subject, "roles": [{ "role": "recruiterLeader", "db": "jobs" }] };
        client.database("$external").run_command(granted).await.expect("the user is there");
    }
}

/// What the page about operating says of TLS.
///
/// # Panics
/// When there is no such section.
pub fn section() -> String {
    let page = fs::read_to_string(workspace().join("docs/operating.md")).expect("the page is there");
    let rest = page.split("\n## TLS and X.509\n").nth(1).expect("the section is there");
    rest.split("\n## ").next().unwrap_or_default().to_owned()
}

/// The only text of the page between these.
///
/// # Panics
/// When it is not there once.
pub fn between(page: &str, begin: &str, end: &str) -> String {
    let [_, rest] = page.split(begin).collect::<Vec<_>>()[..] else { panic!("the page does not have `{begin}` once") };
    rest.split(end).next().unwrap_or_default().to_owned()
}
