//! TLS and X.509: what the page about operating says works from end to end, and each fault says what it is and what to do.

use std::{fs, path::Path};

use bson::doc;
use recruiter_common::{Client, ConnectArgs, NewJob};
use recruiter_dev::embedded::EmbeddedMongo;
use recruiter_tests::{
    clocks::Clock,
    mongo::{PASSWORD, own_mongod},
    processes::Process,
    tls::{Authority, EXPIRED, VALID, between, section},
    wait::SOON,
};

use super::usual_settings::run;

/// The three programs and the library do a job, as the users that the connection strings name.
async fn does_a_job(uri: &str, secrets: &[String]) {
    let start = |name: &str, args: &[&str]| Process::start(name, args, &[("MONGODB_URI", uri), ("RECRUITER_LOG", "debug")]);
    let mut all = vec![start("recruiter", &["run"]), start("recruiter-cleaner", &[]), start("recruiter-worker", &["--builtins"])];
    let client = Client::connect(ConnectArgs::to(uri).timeout(SOON), "application").await.unwrap();
    let job = NewJob::of_class("noop", doc! {}).enqueue(&client).await.unwrap().id;
    client.wait_for_end(job, SOON).await.unwrap();
    for process in &mut all {
        process.stop().await;
        let log = process.stdout() + process.stderr().as_str();
        assert!(!secrets.iter().any(|secret| log.contains(secret.as_str())), "{log}");
    }
    let doctor = run("recruiter", &["doctor", "--json"], &[("MONGODB_URI", uri), ("RECRUITER_CONNECT_TIMEOUT", "1m")]);
    assert!(doctor.out.contains(r#"{"check":"tls","state":"ok","text":"the connection to MongoDB is encrypted"}"#), "{}", doctor.out);
}

/// What no output may have: the password, and each line of each key.
fn secrets(authority: &Authority) -> Vec<String> {
    let files = fs::read_dir(authority.directory()).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap_or_default());
    let keys: Vec<String> = files.filter(|text| text.contains("PRIVATE KEY")).collect();
    let lines = keys.iter().flat_map(|text| text.lines()).filter(|line| line.len() > 20 && !line.contains("-----"));
    lines.map(str::to_owned).chain([PASSWORD.to_owned()]).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_done_over_tls_with_a_password_and_with_a_certificate() {
    let authority = Authority::default();
    let (mongo, root) = authority.replica_set().await;
    authority.make_users(&root).await;
    let section = section();
    let [password, certificate] = ["mongodb://workers", "mongodb://db1"].map(|begin| {
        let uri = between(&section, &format!("\nMONGODB_URI={begin}"), "\n");
        authority.here(&format!("{begin}{uri}"), &mongo)
    });
    let secrets = secrets(&authority);
    assert!(secrets.len() > 4);
    does_a_job(&password, &secrets).await;
    does_a_job(&certificate, &secrets).await;
    // The unit of the page: systemd puts the directory of credentials in the place of `%d`, and copies the file.
    let [name, file] = between(&section, "\nLoadCredential=", "\n").split_once(':').map(<[_; 2]>::from).unwrap().map(str::to_owned);
    let credentials = tempfile::tempdir().unwrap();
    fs::copy(file.replace("/etc/recruiter", &authority.directory().display().to_string()), credentials.path().join(name)).unwrap();
    let unit = between(&section, "\nEnvironment=\"MONGODB_URI=", "\"\n").replace("%d", &credentials.path().display().to_string());
    does_a_job(&authority.here(&unit, &mongo), &secrets).await;
    // The user of the certificate has the rights of its roles only.
    let limit = run("recruiter", &["limits", "set", "printer", "--capacity", "1"], &[("MONGODB_URI", &certificate)]);
    assert!(limit.code == 1 && limit.err.contains("no right to `update` on `jobs.limits`"), "{} {}", limit.code, limit.err);
    // A certificate without a user.
    authority.sign_into("nobody.pem", "nobody", "recruiter", &[], VALID);
    let options = certificate.split_once('?').unwrap().1.replace("workers.pem", "nobody.pem");
    let says = "has no user for the certificate in tlsCertificateKeyFile: create one in its database $external, with the name that `openssl x509 -in ";
    are_named(&[Fault { mongo: &mongo, options, code: 77, says }], &secrets);
    let options = password.split_once('?').unwrap().1.to_owned();
    let says = "MONGODB_URI names none";
    are_named(&[Fault { mongo: &mongo, options, code: 77, says }], &secrets);
}

/// One way to connect, and what a program says and ends with.
struct Fault<'a> {
    mongo: &'a EmbeddedMongo,
    options: String,
    code: i32,
    says: &'static str,
}

/// Each program in turn meets one of the faults.
const PROGRAMS: [(&str, &[&str]); 4] =
    [("recruiter", &["jobs", "list"]), ("recruiter", &["run"]), ("recruiter-worker", &["--builtins"]), ("recruiter-cleaner", &[])];

/// Each is named at the start, in one line at the end, with what to do, and no secret is in the output.
#[track_caller]
fn are_named(faults: &[Fault<'_>], secrets: &[String]) {
    let check = |Fault { mongo, options, code, says }: &Fault<'_>, (name, args): (&str, &[&str])| {
        let uri = format!("mongodb://127.0.0.1:{}/jobs?{options}", mongo.port());
        let said = run(name, args, &[("MONGODB_URI", &uri), ("RECRUITER_CONNECT_TIMEOUT", "4s")]);
        assert_eq!(said.code, *code, "{name} {options}: {}", said.err);
        let last = said.err.lines().last().unwrap_or_default();
        assert!(last.starts_with(&format!("{name}: ")) && last.contains(says), "{name} {options}: {}", said.err);
        assert!(!said.err.contains("the network") && !said.err.contains("similar"), "{name} {options}: {}", said.err);
        // If it waits, it says so in the log before the end.
        let times = if *code == 69 { 2 } else { 1 };
        assert_eq!(said.err.matches(says).count(), times, "{name} {options}: {}", said.err);
        let output = said.out + said.err.as_str();
        assert!(!secrets.iter().any(|secret| output.contains(secret.as_str())), "{name} {options}: {output}");
    };
    std::thread::scope(|scope| {
        for (fault, program) in faults.iter().zip(PROGRAMS.into_iter().cycle()) {
            scope.spawn(move || check(fault, program));
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_between_client_and_server_says_what_it_is_and_what_to_do() {
    let (authority, other) = (Authority::default(), Authority::default());
    for (file, host, until) in
        [("here.pem", "127.0.0.1", VALID), ("elsewhere.pem", "elsewhere.test", VALID), ("old.pem", "127.0.0.1", EXPIRED)]
    {
        authority.sign_into(file, host, "servers", &[host], until);
    }
    authority.sign_into("late.pem", "workers", "recruiter", &[], EXPIRED);
    authority.write("own.pem", &authority.own());
    other.sign_into("stranger.pem", "workers", "recruiter", &[], VALID);
    // A mongod with an expired certificate does not start, so that one begins before.
    let past = Clock::offset("-3650d");
    let begins = past.environment();
    let any = ["--tlsAllowConnectionsWithoutCertificates"];
    let (here, strict, elsewhere, old, own, plain) = tokio::join!(
        authority.mongod("here.pem", &any, &[]),
        authority.mongod("here.pem", &[], &[]),
        authority.mongod("elsewhere.pem", &any, &[]),
        authority.mongod("old.pem", &any, &begins),
        authority.mongod("own.pem", &any, &[]),
        own_mongod(),
    );
    let ca = format!("tls=true&tlsCAFile={}", authority.file("ca.pem").display());
    let as_client = |file: &Path| format!("{ca}&tlsCertificateKeyFile={}", file.display());
    let fault = |mongo, options: &str, says| Fault { mongo, options: options.into(), code: 69, says };
    are_named(
        &[
            fault(&here, "", "the server uses TLS: write tls=true"),
            fault(&plain, &ca, "the server does not use TLS: remove tls=true"),
            fault(&here, "tls=true", "is not signed by a known authority: write tlsCAFile=FILE"),
            fault(&here, &format!("tls=true&tlsCAFile={}", other.file("ca.pem").display()), "is not signed by a known authority"),
            fault(&elsewhere, &ca, "does not have the name of the host"),
            fault(&old, &ca, "the certificate of the server is not valid now: renew it"),
            fault(&own, &ca, "certificate of an authority as its own"),
            fault(&strict, &ca, "seems to want a certificate of the client: write tlsCertificateKeyFile=FILE"),
            fault(&strict, &as_client(&authority.file("late.pem")), "not to accept the certificate of the client"),
            fault(&strict, &as_client(&other.file("stranger.pem")), "not to accept the certificate of the client"),
        ],
        &[secrets(&authority), secrets(&other)].concat(),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_not_what_it_should_be_is_named_before_anything_is_sent() {
    let authority = Authority::default();
    let nobody = own_mongod().await;
    let (certificate, key) = authority.sign("workers", "recruiter", &[], VALID);
    let (_, other_key) = authority.sign("workers", "recruiter", &[], VALID);
    let damaged = |text: &str| text.replacen("\nM", "\n!", 1);
    for (file, content) in [
        ("workers.pem", format!("{certificate}{key}")),
        ("certificate.pem", certificate.clone()),
        ("key.pem", key.clone()),
        ("text.pem", "no certificate\n".into()),
        ("other-key.pem", format!("{certificate}{other_key}")),
        ("damaged.pem", damaged(&certificate)),
        ("damaged-key.pem", format!("{certificate}{}", damaged(&key))),
        ("encrypted.pem", format!("{certificate}-----BEGIN ENCRYPTED PRIVATE KEY-----\n")),
    ] {
        authority.write(file, &content);
    }
    let fault = |options: &str, code, says| {
        let options = options.replace("=@", &format!("={}/", authority.directory().display()));
        Fault { mongo: &nobody, options, code, says }
    };
    are_named(
        &[
            fault("tls=true&tlsCAFile=@missing.pem", 78, "missing.pem: it cannot be read (No such file or directory"),
            fault("tls=true&tlsCAFile=@", 78, "it cannot be read (Is a directory (os error 21)): correct its path, or let the user"),
            fault(
                "tls=true&tlsCAFile=@text.pem",
                78,
                "has no line with `BEGIN CERTIFICATE`: write the file with the certificate of the authority",
            ),
            fault("tls=true&tlsCAFile=@key.pem", 78, "key.pem: the file has no line with `BEGIN CERTIFICATE`"),
            fault("tls=true&tlsCAFile=@damaged.pem", 78, "damaged.pem: the file is damaged"),
            fault("tls=true&tlsCertificateKeyFile=@missing.pem", 78, "missing.pem: it cannot be read"),
            fault(
                "tls=true&tlsCertificateKeyFile=@certificate.pem",
                78,
                "has no line with `PRIVATE KEY`: write the certificate of the client and its",
            ),
            fault(
                "tls=true&tlsCertificateKeyFile=@key.pem",
                78,
                "has no line with `BEGIN CERTIFICATE`: write the certificate of the client",
            ),
            fault("tls=true&tlsCertificateKeyFile=@text.pem", 78, "has no line with `PRIVATE KEY`"),
            fault("tls=true&tlsCertificateKeyFile=@damaged-key.pem", 78, "damaged-key.pem: the file is damaged"),
            fault("tls=true&tlsCertificateKeyFile=@other-key.pem", 78, "the key does not belong to the certificate"),
            fault("tls=true&tlsCertificateKeyFile=@encrypted.pem", 78, "openssl pkey"),
            fault("authMechanism=MONGODB-X509&tls=true", 2, "needs tls=true and tlsCertificateKeyFile=FILE"),
            fault("authMechanism=MONGODB-X509", 2, "needs tls=true and tlsCertificateKeyFile=FILE"),
        ],
        &secrets(&authority),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_warns_of_a_connection_that_leaves_the_machine_without_encryption() {
    let mongo = own_mongod().await;
    // This address leads to this machine, but not by its name.
    let uri = format!("mongodb://0.0.0.0:{}/jobs?directConnection=true", mongo.port());
    Client::connect(uri.as_str(), "application").await.unwrap();
    let said = run("recruiter", &["doctor", "--json"], &[("MONGODB_URI", &uri), ("RECRUITER_CONNECT_TIMEOUT", "1m")]);
    let found = said.out.lines().find(|line| line.contains(r#""check":"tls""#)).unwrap();
    assert!(found.contains(r#""state":"warning""#) && found.contains("is not encrypted") && found.contains("write tls=true"), "{found}");
}
